"""The sampler service: compiles grammars and answers which tokens may come next."""
