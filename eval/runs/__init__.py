"""A whole run or study, its verdict and its report."""
