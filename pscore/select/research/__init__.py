"""Selectors of the published comparison with LDTE-BS (docs/ldte.md); none of them is a default."""
