"""The drill: runs a user's program under injected faults and checks that it ends with the same bits."""
