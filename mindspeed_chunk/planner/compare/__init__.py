"""What MindSpeed-MM's FSDP2 back end cannot run. A plan shows it to compare, and never recommends it."""
