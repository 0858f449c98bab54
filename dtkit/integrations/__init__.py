"""Other frameworks and libraries on dtkit's engines. Each package is imported only when needed."""
