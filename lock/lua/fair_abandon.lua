-- Give up an attempt: leave the queue, give back a grant that has come meanwhile, and refuse a command that is
-- still on its way; all in one step.
--
-- KEYS  1 lock  2 tombstone of this attempt  3 queue  4 alive
-- ARGV  1 token  2 how long a command may still be on its way, ms
--
-- Returns 1 released, 0 it held nothing.

local taken = 0
local holder = redis.pcall('GET', KEYS[1]) -- a foreign key is no reason to leave the others as they are
redis.pcall('ZREM', KEYS[3], ARGV[1])
redis.pcall('ZREM', KEYS[4], ARGV[1])
if type(holder) == 'string' and string.sub(holder, 1, 26) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  taken = 1
end
redis.pcall('SET', KEYS[2], 'abandoned', 'PX', ARGV[2])
return taken
