"""How model families write reasoning and calls: parsers and grammars, one file a family."""
