"""Features of frames: clips are found and decoded, looked at by InceptionV3, and get X2048 beside what they hold."""
