"""What the scripts `experiments/study_*.py` share: trained models, measurements, records, pictures.

| module | what |
|---|---|
| `records` | finished measurements in a .jsonl file, by which a study goes on where it was left |
| `flags` | what scripts check of their flags before they begin |
| `sweep` | training runs of a study, and what is recorded of them |
| `penalty` | the sparsity term, its coefficient an argument of the compiled step |
| `quality` | held-out cross-entropy of changed models, without compiling each of them |
| `fusing` | a run of layers to cut, and the ways to cut it |
| `stages` | distillation of a changed model |
| `timing` | dense and sparse variants of one model in turns; many models in turns |
| `trained` | a trained model on real text in the place of `sparsejax.benchmark`'s random one |
| `plots`, `shallow_plots`, `figures` | the figures, and what they share |
"""
