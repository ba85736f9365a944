"""Programs in a box: started, listened to, bounded, ended."""
