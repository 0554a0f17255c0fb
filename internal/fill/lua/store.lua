-- Store what was loaded and release the lock, if the lock is still ours.
--
-- KEYS  1 value  2 lock
-- ARGV  1 token  2 entry  3 its life, ms
--
-- Returns 1 stored, 0 refused: the key was deleted or set, or the lock was lost.

local lock = redis.pcall('GET', KEYS[2])
if type(lock) == 'string' and string.sub(lock, 1, 27) == 'H' .. ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  redis.call('DEL', KEYS[2])
  return 1
end
-- No two entries are alike: if ours is there, an earlier try stored it and its reply was lost.
if redis.pcall('GET', KEYS[1]) == ARGV[2] then return 1 end
return 0
