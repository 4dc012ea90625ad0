"""Stage fusion (RLHFuse, arXiv 2409.13221): between stages and inside the training stage."""
