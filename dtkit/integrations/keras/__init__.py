"""Keras models, with Keras's torch and tensorflow backends: ``cluster.train(keras_model, data)``.

- `adapter`: what `cluster.train` makes of a Keras model and of Keras's names and objects;
- `saved_model`: a Keras model as plain values that travel to the engines;
- `module`: a Keras model as a torch module, whose parameters are the model's variables;
- `tensorflow_backend`, `torch_backend`: how a backend computes loss and gradients;
- `optimizer`: a Keras optimizer as a torch optimizer;
- `metrics`: Keras metrics, merged over ranks.
"""
