-- Give the mutex back, if it is still ours.
--
-- KEYS  1 lock  2 tombstone of this attempt
-- ARGV  1 token  2 life of the tombstone, ms
--
-- Returns 1 released, also if an earlier try has done it and its reply was lost; 0 not ours.

if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.pcall('SET', KEYS[2], 'released', 'PX', ARGV[2])
  return 1
end
if redis.call('GET', KEYS[2]) == 'released' then return 1 end
return 0
