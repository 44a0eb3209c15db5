"""What MindSpeed-MM's FSDP2 back end cannot run. The planner shows it to compare, and never recommends it."""
