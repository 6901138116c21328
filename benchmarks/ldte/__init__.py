"""Are gradients Laplace distributed, what is LDTE-BS's estimate worth, and what does it cost?"""
