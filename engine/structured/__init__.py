"""What an output must fit, as masks over the vocabulary: choices, regular expressions, grammars, schemas."""
