"""Everything that touches megatron.core, one seam a file."""
