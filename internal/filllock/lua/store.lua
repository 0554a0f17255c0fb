-- Store what was loaded and release the lock, if this attempt still holds it.
--
-- KEYS  1 value  2 lock
-- ARGV  1 token  2 stamp  3 entry  4 its TTL, ms
--
-- Returns 1 stored, 0 refused: the key was deleted, set or expired, or the lock was lost.

local lock = redis.pcall('GET', KEYS[2])
if type(lock) == 'string' and string.sub(lock, 1, 43) == 'H' .. ARGV[1] .. ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  redis.call('DEL', KEYS[2])
  wake(KEYS[2], '')
  return 1
end
if type(lock) == 'string' and string.sub(lock, 1, 27) == 'H' .. ARGV[1] then
  redis.call('DEL', KEYS[2]) -- a late command was granted the lock again: no load runs under it
  wake(KEYS[2], '')
end
-- Every entry is unique: if this one is there, an earlier try stored it and its reply was lost.
if redis.pcall('GET', KEYS[1]) == ARGV[3] then return 1 end
return 0
