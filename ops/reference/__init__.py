"""The specification of every op as plain PyTorch: short, slow, and never calling a kernel."""
