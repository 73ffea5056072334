"""The weight-gradient split: the autograd function, the store of deferred work, and the kernel that does it."""
