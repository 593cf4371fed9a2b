"""The parts of compare_torch.py. shapes, figures, records and tables need no PyTorch."""
