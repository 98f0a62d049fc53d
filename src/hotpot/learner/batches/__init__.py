"""What an update learns from: pieces and their loss tokens in one fixed order, and their layout in forward passes."""
