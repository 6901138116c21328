"""What a run may choose on the server: how an update is applied and how a pull is answered, one file each."""
