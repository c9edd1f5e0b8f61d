"""The engine without a model: the product's scheduler and KV cache on a virtual clock, with steps whose seconds an
analytic cost model predicts."""
