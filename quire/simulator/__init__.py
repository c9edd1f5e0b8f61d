"""The engine without a model: the product's scheduler and KV cache on a virtual clock, with steps that cost what an
analytic model says."""
