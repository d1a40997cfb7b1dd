-- The build of the agent that a host is to run, JSON, while it does not.
ALTER TABLE host ADD COLUMN upgrade TEXT;
