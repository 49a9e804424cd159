"""The main job on real digits: train, be killed, resume somewhere else, end with the same bits."""
