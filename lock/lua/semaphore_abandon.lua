-- Give up an attempt whose outcome is unknown: give back what it took, and refuse it if it is still on its way.
--
-- KEYS  1 holders  2 tombstone of this attempt  3 details
-- ARGV  1 token  2 how long it may still be on its way, ms
--
-- Returns 1 released, 0 it held nothing.

local taken = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('ZCARD', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
redis.call('SET', KEYS[2], 'abandoned', 'PX', ARGV[2])
return taken
