"""The protocol in stubs and numpy alone, as another language would speak it."""
