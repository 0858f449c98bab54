"""Sentences of a verification about differences: their reasons, and whether they are rounding."""

from __future__ import annotations

OWN_GENERATOR_IN_DATA = (
    "the data gives other samples each time: it draws from a generator of its own, or reads a clock. Draw from the "
    "global generator of torch, numpy or Python, which train() seeds for each sample"
)
OWN_GENERATOR_IN_STEP = (
    "the step gives another result each time: it draws from a generator of its own, or its kernels are not "
    "deterministic (torch.use_deterministic_algorithms)"
)
RANDOM_STEP = "the model or the step draws random numbers, and each rank draws its own"
NOT_A_MEAN = (
    "the loss of a batch is not the mean of the losses of its parts. Samples of a batch may depend on each other (a "
    "contrastive loss, or the routers' loss of a mixture of experts in micro-batches). Or it is a mean over something "
    "else than samples (tokens with labels of -100); then return (sum, weight) instead"
)
ROUNDING = (
    "it is rounding in {dtype}, which the training amplifies: repeated in float64, the two differ by {difference:.2g} "
    "(tolerance {tolerance:g})"
)
ERROR_IN_FLOAT64 = (
    "rounding in {dtype} doesn't explain it: repeated in float64, the two still differ by {difference:.2g} (tolerance "
    "{tolerance:g})"
)
NO_ERROR_IN_FLOAT64 = (
    "the two differ in {dtype} only, but rounding doesn't explain {name}: most of it differs over ten times as much as "
    "one process in {dtype} from itself in float64. Look for code that depends on the dtype"
)
SAME_PRECISION = (
    "whether rounding explains it is unknown: a model in float64 still computes in {computed} here. Verify fewer "
    "steps, or with torch.optim.SGD, which doesn't amplify rounding"
)
NOT_REPEATED = (
    "whether rounding explains it is unknown: repeated in float64, it failed with {cause}. Train model.double() with "
    "data in float64, and verify that run"
)
TOO_LARGE = (
    "whether rounding explains it is unknown: {numbers:,} parameters are too many to repeat it in float64. Train a "
    "smaller model of the same kind as model.double(), with data in float64, and verify that run"
)
GROWN_ROUNDING = (
    "the difference was {difference:.2g} after {steps} steps, and grew much faster than the steps. Rounding in {dtype} "
    "does that. Verify fewer steps, or train in float64"
)
STILL_DIFFERS_BY_PART = (
    "{note}. One process that takes each rank's part of a batch by itself rounds the same sums, but differs by "
    "{difference:.2g}, too (tolerance {tolerance:g}): a difference in float32 that changes how a number is rounded "
    "becomes as large as that rounding. Verify fewer steps, or without precision="
)
