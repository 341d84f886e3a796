"""The jobs of the pipeline: tables declared as data, and the engine that keeps them up to date."""
