"""Operators with their cases, each checked on the platforms that flags name: the scripts of
test/infiniop and case files of GGUF."""
