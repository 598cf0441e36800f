"""Kernels in C++ for CPUs: `native` builds and loads them; each source file is one kernel."""
