"""From a source to a pack of lines: where they are, their characters, who is held back, and what is in it."""
