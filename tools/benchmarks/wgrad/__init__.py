"""Shapes of layers, a stack of them on one device, and the times of W and the other passes."""
