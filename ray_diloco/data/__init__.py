"""Documents into numbered blocks of token ids, and the order in which a run reads them.

`blocks.prepare` turns a source (`sources`) and a tokenizer (`tokenizers`) into a cached, memory-mapped `Corpus`;
`permutation` says which block stands where in which epoch.  Nothing here knows islands, ledgers or Ray.
"""
