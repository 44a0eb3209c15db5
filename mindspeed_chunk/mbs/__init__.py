"""ChunkMBS: the batch of a block runs as micro-chunks inside one FSDP2 unshard."""
