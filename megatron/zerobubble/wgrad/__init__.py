"""Split and defer weight gradients: the autograd function, the store of deferred W, and the wgrad GEMM."""
