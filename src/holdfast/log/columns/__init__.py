"""Record batches as columns: their headers with numpy, their messages as Arrow."""
