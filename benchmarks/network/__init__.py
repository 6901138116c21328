"""What training costs over a network: a model in virtual time, what feeds it, and real runs that check it."""
