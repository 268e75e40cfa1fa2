"""Models as folders that `transformers` loads without adlm: generated code, weights, tokenizer, model card."""
