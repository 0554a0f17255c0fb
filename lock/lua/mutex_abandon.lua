-- Give up an attempt whose outcome is unknown: give back what it took, and refuse it if it is still on its way.
--
-- KEYS  1 lock  2 tombstone of this attempt
-- ARGV  1 token  2 how long it may still be on its way, ms
--
-- Returns 1 released, 0 it held nothing.

local taken = 0
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  taken = 1
end
redis.call('SET', KEYS[2], 'abandoned', 'PX', ARGV[2])
return taken
