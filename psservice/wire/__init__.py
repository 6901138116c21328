"""Messages that several rooms read: identities, names and pushes."""
