"""An engine against its model, block by block, and the search for the first wrong tensor."""
