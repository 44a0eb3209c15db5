"""What one MoE layer call costs before it runs, and the number of chunks that costs least. Without torch."""
