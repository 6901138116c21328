"""What worker and server must agree on: layout, codecs, frames, stubs."""
