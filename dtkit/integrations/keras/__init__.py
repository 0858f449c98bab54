"""Keras models, with Keras's torch and tensorflow backends: ``cluster.train(keras_model, data)``.

- `adapter`: conversion of a Keras model, and of Keras's names and objects, for `cluster.train`;
- `saved_model`: a Keras model as plain values, which are sent to the engines;
- `module`: a Keras model as a torch module, whose parameters are the model's variables;
- `tensorflow_backend`, `torch_backend`: how a backend computes loss and gradients;
- `optimizer`: a Keras optimizer as a torch optimizer;
- `metrics`: Keras metrics, merged over ranks.
"""
