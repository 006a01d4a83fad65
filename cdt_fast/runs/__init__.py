"""What a run is: its folder and settings, the parts built from them, its evaluation, report and pictures."""
