"""What Dynamo does otherwise while it traces a step, so that compiled code means what the step means."""
