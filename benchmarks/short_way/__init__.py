"""What a step and a server cost beside their anchors, before and after."""
