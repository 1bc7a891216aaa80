"""Parts of the model: plain torch modules over `ops`."""
