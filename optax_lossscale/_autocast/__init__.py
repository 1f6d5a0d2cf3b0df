"""Float32 functions that compute in half precision where that is fast and safe."""
