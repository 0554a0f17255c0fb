-- Give up an attempt to lock whose outcome is unknown: release what it took,
-- and refuse it if it is still on its way.
--
-- KEYS  1 lock
-- ARGV  1 token  2 how long it may still be on its way, ms
--
-- Returns 1 released, 0 not ours.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) == 'string' and string.sub(lock, 1, 27) == 'H' .. ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 1
end
if not lock then redis.call('SET', KEYS[1], 'X' .. ARGV[1], 'PX', ARGV[2]) end
return 0
