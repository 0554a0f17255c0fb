-- Give up an attempt to lock whose outcome is unknown: release the lock if this attempt took it,
-- and refuse its command if that is still in transit.
--
-- KEYS  1 lock
-- ARGV  1 token  2 how long the command may still be in transit, ms
--
-- Returns 1 released, 0 not held by this attempt.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) == 'string' and string.sub(lock, 1, 27) == 'H' .. ARGV[1] then
  redis.call('DEL', KEYS[1])
  wake(KEYS[1], '')
  return 1
end
if not lock then redis.call('SET', KEYS[1], 'X' .. ARGV[1], 'PX', ARGV[2]) end
return 0
