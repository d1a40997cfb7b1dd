-- Each hello revokes the older certificates of its host: without this, a thousand hosts that connect look through a million.
CREATE INDEX certificate_host ON certificate (host);
